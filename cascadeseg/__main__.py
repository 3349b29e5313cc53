"""``python -m cascadeseg``."""

from cascadeseg.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
