"""CURVE keys and trust: key files, the file of trusted public keys, and ``kvbus keys``."""
