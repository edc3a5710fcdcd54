"""What runs may be told; see tests/pinned.py."""

from pinned import Cases, chosen, odd

cases = Cases("run")


@cases
def what_is_allowed() -> object:
    return [odd("fsdfm.run"), odd("fsdfm.runtime")]


@cases
def numbers_that_were_chosen() -> object:
    return [chosen("fsdfm.run"), chosen("fsdfm.runtime")]


test_what_is_computed = cases.test()
