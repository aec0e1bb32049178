"""What the tests notice: single changes of the code, of which each should make a test fail.

`python -m tests.mutants` picks changes by a seed, and tries each in a copy of the checkout. First
it runs the tests of the matching folders once, with all places of the picked changes marked, and
records which tests reach which place: only these can notice a change there, and so each change is
tried with their files alone. The name of the running test is in the environment, so that what a
test starts is recorded as well.

A change that no test can notice, since the code means the same with it, is argued for in
`equivalent.py`.
"""
