"""CURVE keys: key files, the file of trusted public keys, and ``kvbus keys``."""
