"""The method, a file per step; `pipeline` reads like its description."""
