"""`python -m dynadapt` is the command."""

from dynadapt.cli import run

if __name__ == "__main__":
    run()
