"""Complete programs built on lightning_par; start with ``train.py``."""
