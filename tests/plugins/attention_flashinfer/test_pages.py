"""Index arithmetic. Oracle: keys laid out plainly, and page by page with Python integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken.testing.fakes import make_batch
from freetoken.vocab.errors import EngineError
from freetoken_attention_flashinfer.pages import page_index

SEQUENCES = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=9)
PAGES = st.sampled_from((1, 2, 16, 64))


@given(SEQUENCES, PAGES, st.integers(0, 5))
def test_gathering_by_the_index_gives_the_plain_sequence(
    lens: list[tuple[int, int]], page: int, spare_columns: int
) -> None:
    """Numbers are written where the core puts each token; read back through the index, they come out in order."""
    query_lens, prefix_lens = zip(*lens, strict=True)
    batch = make_batch(query_lens, prefix_lens, page)
    table = torch.nn.functional.pad(batch.page_table, (0, spare_columns))
    pool = torch.full((int(table.max()) + 1, page), -1)
    plain = []
    for b, (query, prefix) in enumerate(lens):
        plain.append([1000 * b + position for position in range(query + prefix)])
        for position, token in enumerate(plain[-1]):
            pool[batch.page_table[b, position // page], position % page] = token
    index = page_index(query_lens, prefix_lens, page, table.shape[1])
    ids = table.flatten()[torch.from_numpy(index.table_entries).long()]
    for b, tokens in enumerate(plain):
        pages = ids[index.page_starts[b] : index.page_starts[b + 1]]
        length = (len(pages) - 1) * page + int(index.last_page_tokens[b])
        assert pool[pages.long()].flatten()[:length].tolist() == tokens
        assert index.query_starts[b + 1] - index.query_starts[b] == query_lens[b]


@given(SEQUENCES, PAGES)
def test_offsets_and_last_pages(lens: list[tuple[int, int]], page: int) -> None:
    """Pages are counted one token at a time; the last page is never empty."""
    query_lens, prefix_lens = zip(*lens, strict=True)
    width = max((q + p - 1) // page + 1 for q, p in lens)
    index = page_index(query_lens, prefix_lens, page, width)
    entries, starts, last = [], [0], []
    for b, (query, prefix) in enumerate(lens):
        used = {}
        for position in range(query + prefix):
            used[position // page] = used.get(position // page, 0) + 1
        entries += [b * width + column for column in used]
        starts.append(len(entries))
        last.append(used[max(used)])
    assert index.table_entries.tolist() == entries
    assert index.page_starts.tolist() == starts
    assert index.last_page_tokens.tolist() == last
    assert index.query_starts.tolist() == [sum(query_lens[:b]) for b in range(len(lens) + 1)]
    assert index.context_lens.tolist() == [q + p for q, p in lens]
    arrays = (index.context_lens, index.query_starts, index.page_starts, index.last_page_tokens, index.table_entries)
    assert {str(array.dtype) for array in arrays} == {"int32"}


def test_a_table_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(EngineError, match="3 pages in a page table of 2 columns"):
        page_index((1,), (32,), 16, 2)
