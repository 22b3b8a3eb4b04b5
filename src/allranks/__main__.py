"""`python -m allranks`: the same as the `allranks` command."""

from allranks.cli.main import main

if __name__ == "__main__":
    main()
