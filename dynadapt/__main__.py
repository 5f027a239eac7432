"""`python -m dynadapt` is the command."""

from dynadapt.cli import main

if __name__ == "__main__":
    main()
