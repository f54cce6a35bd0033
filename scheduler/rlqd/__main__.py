from __future__ import annotations


def main() -> None:
    raise SystemExit("rlqd is not written yet")


if __name__ == "__main__":
    main()
