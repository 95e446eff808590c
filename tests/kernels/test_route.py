import pytest
import torch

E = 12
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = torch.randn(9, E, generator=GENERATOR)
CORRECTION = torch.randn(E, generator=GENERATOR)
route = torch.ops.treadle.route


def test_softmax_before_and_after_the_choice():
    before, ids = route(LOGITS, None, None, 3)
    after, same = route(LOGITS, None, None, 3, score_after_topk=True)
    assert torch.equal(ids, same)
    assert ids.dtype == torch.int32
    assert before.dtype == torch.float32
    largest = LOGITS.argsort(-1, descending=True)[:, :3]
    assert torch.equal(ids.long(), largest)
    exp = LOGITS.exp()
    torch.testing.assert_close(before, exp.gather(1, largest) / exp.sum(-1, keepdim=True))
    torch.testing.assert_close(after.sum(-1), torch.ones(9))
    torch.testing.assert_close(before / before.sum(-1, keepdim=True), after)
    torch.testing.assert_close(route(LOGITS, None, None, 3, normalize=True)[0], after)


def test_a_correction_counts_in_the_choice_only():
    weights, ids = route(LOGITS, CORRECTION, None, 2, "sigmoid", normalize=True, norm_eps=1e-20, scale=2.5)
    assert torch.equal(ids.long(), (LOGITS.sigmoid() + CORRECTION).argsort(-1, descending=True)[:, :2])
    raw = LOGITS.sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights, raw / raw.sum(-1, keepdim=True) * 2.5)


@pytest.mark.parametrize(("group_score", "fill"), [("max", 0.0), ("top2", -3.4e38)])
def test_only_experts_of_the_best_groups_are_chosen(group_score: str, fill: float):
    scores = LOGITS.sigmoid()
    _, ids = route(LOGITS, None, None, 3, "sigmoid", False, 4, 2, group_score, fill)
    for row, chosen in zip(scores, ids):
        grouped = row.view(4, 3)
        value = grouped.sort(-1).values[:, -2:].sum(-1) if group_score == "top2" else grouped.amax(-1)
        best = set(value.topk(2).indices.tolist())
        allowed = [i for i in range(E) if i // 3 in best]
        assert sorted(chosen.tolist()) == sorted(sorted(allowed, key=lambda i: -row[i])[:3])


def test_the_other_knobs():
    capped, _ = route(LOGITS, None, None, E, "none", softcap=0.5)
    torch.testing.assert_close(capped, (0.5 * torch.tanh(LOGITS / 0.5)).sort(-1, descending=True).values)
    roots, _ = route(LOGITS, None, None, E, "sqrtsoftplus")
    torch.testing.assert_close(roots, LOGITS.exp().log1p().sqrt().sort(-1, descending=True).values)
    tiny = torch.full((1, 4), -20.0)
    clamped, _ = route(tiny, None, None, 2, "sigmoid", normalize=True, norm_min=0.5)
    torch.testing.assert_close(clamped, tiny.sigmoid()[:, :2] / 0.5)
    scale = torch.arange(1.0, E + 1)
    plain, ids = route(LOGITS, None, None, 4)
    scaled, _ = route(LOGITS, None, scale, 4)
    torch.testing.assert_close(scaled, plain * (ids + 1))
    assert torch.equal(route(LOGITS.bfloat16(), None, None, 4)[0], route(LOGITS.bfloat16().float(), None, None, 4)[0])


def test_experts_that_all_visit_share_the_normalisation():
    weights, ids = route(LOGITS, CORRECTION[:-2], None, 3, "sigmoid", normalize=True, always=2)
    assert weights.shape == ids.shape == (9, 5)
    assert ids[:, 3:].tolist() == [[E - 2, E - 1]] * 9
    assert int(ids[:, :3].max()) < E - 2
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


def test_sparsemixer_weighs_against_what_is_near():
    weights, ids = route(torch.tensor([[4.0, 3.99, 1.0, 3.9]]), None, None, 2, "sparsemixer", jitter=0.01)
    assert ids.tolist() == [[0, 1]]
    # 3.99 lies within 2 % of 4; for the second choice, 3.9 is too far from 3.99 and the first is out
    first = torch.tensor([4.0, 3.99]).softmax(0)[0]
    assert weights[0, 0].item() == pytest.approx(first.item())
    assert weights[0, 1].item() == pytest.approx(1.0)


def test_an_unknown_score_is_refused():
    with pytest.raises(ValueError, match="softmax, sigmoid"):
        route(LOGITS, None, None, 2, "sigmoidal")
