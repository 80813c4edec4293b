"""The command ``kvbus doctor``. Each check removes everything that it created."""
