"""`python -m ridgeline`: the command line where the script `ridgeline` is not on the path."""

from ridgeline.cli import main

if __name__ == "__main__":
    main()
