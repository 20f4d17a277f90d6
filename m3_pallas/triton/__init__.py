"""GPU kernels: Pallas lowered through Triton, for ROCm and CUDA. The only folder that imports that backend."""
