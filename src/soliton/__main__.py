"""``python -m soliton``: the same command as ``soliton``."""

from soliton.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
