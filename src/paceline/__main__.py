"""``python -m paceline``: the command line without the installed script."""

from .cli import main

if __name__ == "__main__":
    main()
