"""JAX programs on CPU: each starts anew, with the JAX that `make .engines/orbax/.installed` installs."""
