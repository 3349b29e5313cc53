"""``python -m cascadeseg``."""

from cascadeseg.cli import program

if __name__ == "__main__":
    program()
