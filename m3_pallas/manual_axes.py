"""Types under `jax.shard_map`: what a kernel or a loop makes varies over the mesh axes its inputs vary over."""

import jax
import jax.numpy as jnp


def never(*sources: jax.Array) -> jax.Array:
    """False, typed as varying over the manual mesh axes of all of `sources`, none of them empty."""
    result = jnp.bool_(False)
    for source in sources:
        first = source[(0,) * source.ndim]
        result |= (first != first) & False
    return result


def vary_like(init: jax.Array, *sources: jax.Array) -> jax.Array:
    """`init`, typed as varying like all of `sources`, as a loop's carry has to be from its start."""
    return jnp.where(never(*sources), jnp.zeros((), init.dtype), init)


def outputs_like(shapes: tuple[jax.ShapeDtypeStruct, ...], *sources: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`shapes`, typed as varying like all of `sources`, as `pallas_call` asks of its outputs."""
    axes = getattr(jax.typeof(never(*sources)), "manual_axis_type", None)
    if axes is None:
        return shapes
    return tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=axes) for s in shapes)
