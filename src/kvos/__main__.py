"""``python -m kvos`` is the command ``kvos``."""

from kvos.cli import main

if __name__ == "__main__":
    main()
