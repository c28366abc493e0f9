"""Every routing case through plan, dispatch and combine: all are the oracle's."""

import cases
import harness


@harness.on_each_combination_of(cases.CASES + cases.MANY_EXPERTS)
def test_plan_rows_and_sums_are_the_oracles(backend, case, ranks):
    harness.check_case(case, backend, ranks)
