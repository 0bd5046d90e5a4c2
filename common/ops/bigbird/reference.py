"""BigBird, literally: the tokens that each query sees, and one softmax per query."""

from torch import Tensor

from ..shared.reference_tools import softmax_where


def bigbird_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    *,
    chunk_size: int,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """One query at a time; arguments as in ``bigbird_attention``. O(n²): for comparison only."""

    def sees(i: int, j: int, count: int) -> bool:
        query, key, last = i // chunk_size, j // chunk_size, (count - 1) // chunk_size
        ends = (0, last)
        return query in ends or key in ends or abs(query - key) <= 1 or key in random_chunks(query, last)

    def random_chunks(query: int, last: int) -> list[int]:
        left = [chunk for chunk in range(1, last) if abs(query - chunk) > 1]
        row = numbers[query % len(numbers)].tolist()
        return [left.pop(number % len(left)) for number in row[: len(left)]]

    return softmax_where(q, k, v, key_padding_mask, query_padding_mask, sees)
