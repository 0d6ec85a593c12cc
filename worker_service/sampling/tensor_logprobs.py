"""Report log-probabilities from tensors, on whatever device they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from worker_service.sampling.logprobs import ScoreReport, first_of_each
from worker_service.step_work import Int32Array


def report_tensors(scores: Tensor, tokens: Int32Array, num_likeliest: int, normalize: bool) -> ScoreReport:
    """Report as ``logprobs.report_arrays``, of which a row's bits do not depend on the other rows either.

    Args:
        scores: [num_rows, vocab_size] float32. -inf: cannot be sampled.
        tokens: [num_rows].
        num_likeliest: ids beside the token itself; at most the vocabulary.
        normalize: report log-softmax instead of the scores.
    """
    own_ids = torch.from_numpy(tokens).to(scores.device, torch.int64)[:, None]
    own = scores.gather(1, own_ids)
    ranks = 1 + (scores > own).sum(dim=1)
    equal = scores == own
    for place in (equal.sum(dim=1) > 1).nonzero().flatten().tolist():
        ranks[place] += equal[place, : int(tokens[place])].sum()
    ids = own_ids.cpu()
    if num_likeliest:
        least = scores.topk(num_likeliest, dim=1, sorted=True).values[:, -1:]
        places, candidates = (scores >= least).nonzero(as_tuple=True)
        found = first_of_each(
            places.cpu().numpy(), candidates.cpu().numpy(), scores[places, candidates].cpu().numpy(), num_likeliest
        )
        ids = torch.cat([ids, torch.from_numpy(found)], dim=1)
    # A masked row with nothing left has no distribution: all of it is as impossible as before.
    reported = scores.log_softmax(dim=1).nan_to_num(nan=-torch.inf, neginf=-torch.inf) if normalize else scores
    values = reported.gather(1, ids.to(scores.device)).cpu()
    return ScoreReport(ids.to(torch.int32).numpy(), values.numpy(), ranks.to(torch.int32).cpu().numpy())
