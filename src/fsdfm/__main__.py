"""`python -m fsdfm` is `fsdfm`."""

from fsdfm.cli import main

main()
