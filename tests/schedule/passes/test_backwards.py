"""``backwards_like``: valid, the backwards of another schedule, gradients of a stage added in the order of its B's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.schedule import Schedule, check_schedule, generate, parse_schedule
from jaxpipe.schedule.passes.braid import backwards_like, fused_backwards, split_backwards, with_fused


def weight_orders(schedule: Schedule) -> dict[int, list[int]]:
    """Return, by stage, the microbatches in the order in which their weight gradients are added."""
    orders: dict[int, list[int]] = {}
    for action in schedule.actions():
        if action.op in ("W", "BW"):
            orders.setdefault(action.stage, []).append(action.microbatch)
    return orders


def test_a_backward_fused_in_front_of_a_waiting_w_keeps_the_order_when_split() -> None:
    """The exact model may answer so: BW of microbatch 2 stands before W of microbatch 1."""
    gpipe = split_backwards(generate("gpipe", 1, 4))
    head = str(gpipe).partition("rank 0:")[0]
    fused = parse_schedule(f"{head}rank 0: F0.0 F0.1 F0.2 F0.3 B0.0 W0.0 B0.1 BW0.2 W0.1 BW0.3\n")
    split = backwards_like(fused, gpipe)
    check_schedule(split)
    assert weight_orders(split) == {0: [0, 1, 2, 3]}


@given(
    name=st.sampled_from(["zb-h1", "zb-h2", "v-half", "interleaved-1f1b", "gis", "1f1b"]),
    ranks=st.integers(2, 4),
    microbatches=st.integers(2, 6),
    seed=st.randoms(use_true_random=False),
)
def test_any_mixture_of_backwards_split_again_keeps_the_order(
    name: str, ranks: int, microbatches: int, seed: object
) -> None:
    microbatches *= ranks
    like = split_backwards(generate(name, ranks, microbatches))
    pairs = [(stage, i) for stage in range(like.placement.num_stages) for i in range(microbatches)]
    mixed = with_fused(like, frozenset(pair for pair in pairs if seed.random() < 0.5))  # type: ignore[attr-defined]
    again = backwards_like(mixed, like)
    check_schedule(again)
    assert not fused_backwards(again)
    assert all(order == sorted(order) for order in weight_orders(again).values())
