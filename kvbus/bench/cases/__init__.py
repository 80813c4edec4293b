"""The cases of ``kvbus bench``, and the command."""
