"""How tensors are read: plans of byte ranges, the one executor, a rank's plan, and lazy tensors."""
