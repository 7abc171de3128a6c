"""Both ledgers of a run, closed by a reader who has nothing but its summary.json."""


def closed(ledger: dict) -> dict:
    """Both equations, from the summary alone."""
    entries = ledger["rollouts"]
    assert ledger["admitted"] == sum(entries.values()) and min(entries.values()) >= 0, ledger
    rest = [ledger[f"{name}_tokens"] for name in ("wasted", "waiting", "in_flight")]
    assert ledger["generated_tokens"] == sum(ledger["tokens"].values()) + sum(rest) and min(rest) >= 0, ledger
    return ledger
