"""Studies: what few-step training gains where laws are known, one factor at a time, and the toy of the paper."""
