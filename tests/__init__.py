import os

# Before torch is imported: threads that wait leave the processor to the other processes of pytest's ``-n auto``.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
