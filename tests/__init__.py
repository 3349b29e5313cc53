import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Before torch is imported: threads that wait for others leave the processor to the other processes of ``-n auto``."""
