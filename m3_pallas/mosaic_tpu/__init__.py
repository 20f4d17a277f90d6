"""TPU kernels: Pallas lowered through Mosaic. The only folder that imports that backend."""
