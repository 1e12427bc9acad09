"""`python -m headrace` is the `headrace` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
