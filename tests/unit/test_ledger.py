import pytest

from spmd_rl.orchestrator.ledger import Ledger


def filled() -> Ledger:
    ledger = Ledger()
    ledger.admit(10)
    for _ in range(6):
        ledger.generate(7)
        ledger.end(5, 2)
    ledger.settle("trained", 3, 15)
    ledger.settle("failed", 1, 5)
    ledger.settle("dropped", 1, 5)
    return ledger


def test_both_equations_hold_while_everything_is_counted():
    ledger = filled()
    ledger.assert_closed(in_flight=4, waiting=1)
    ledger.assert_tokens_closed()
    assert (ledger.waiting_tokens, ledger.wasted_tokens) == (5, 12)


def test_a_lost_rollout_is_named_with_all_the_numbers():
    with pytest.raises(RuntimeError, match=r"admitted 10 != 9 = trained 3 \+ filtered 0 \+ dropped 1 \+ failed 1"):
        filled().assert_closed(in_flight=3, waiting=1)


def test_a_lost_token_is_named_with_all_the_numbers():
    ledger = filled()
    ledger.generate(1)
    with pytest.raises(RuntimeError, match=r"generated 43 != 42 = .* \+ wasted 12 \+ waiting 5"):
        ledger.assert_tokens_closed()


def test_tokens_that_no_engine_has_counted_are_found_in_between():
    ledger = Ledger()
    ledger.end(5, 2)
    ledger.assert_generated(ledger.accounted_tokens, reported=7)
    with pytest.raises(RuntimeError, match="7 tokens are accounted for, engines generated only 6"):
        ledger.assert_generated(ledger.accounted_tokens, reported=6)


def test_tokens_of_a_group_that_starts_again_are_wasted():
    ledger = filled()
    ledger.waste(5)
    ledger.assert_tokens_closed()
    assert ledger.waiting_tokens == 0


def test_the_state_restores_what_it_was_taken_from():
    ledger = Ledger()
    ledger.restore(filled().state())
    assert ledger.state() == filled().state()
    ledger.assert_closed(in_flight=4, waiting=1)
