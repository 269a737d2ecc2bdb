"""`python -m orbit_operator`."""

from orbit_operator.main import main

if __name__ == "__main__":
    main()
