"""Report log-probabilities from tensors, on whatever device they lie."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.backend import fits_gpu_kernels
from worker_service.forward.device_copies import to_device
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
    if fits_gpu_kernels(scores):
        return _report_by_kernels(scores, tokens, num_likeliest, normalize)
    own_ids = torch.from_numpy(tokens).to(scores.device, torch.int64)[:, None]
    own = scores.gather(1, own_ids)
    ranks = 1 + (scores > own).sum(dim=1, dtype=torch.int32)
    equal = scores == own
    for place in (equal.sum(dim=1, dtype=torch.int32) > 1).nonzero().flatten().tolist():
        ranks[place] += equal[place, : int(tokens[place])].sum()
    ids = own_ids.cpu()
    if num_likeliest:
        ids = torch.cat([ids, _likeliest(scores, num_likeliest)], dim=1)
    reported = scores.log_softmax(dim=1) if normalize else scores
    # A masked row with nothing left has no distribution: all of it is as impossible as before.
    values = reported.gather(1, ids.to(scores.device)).nan_to_num(nan=-torch.inf, neginf=-torch.inf).cpu()
    return ScoreReport(ids.to(torch.int32).numpy(), values.numpy(), ranks.cpu().numpy())


def _report_by_kernels(scores: Tensor, tokens: Int32Array, num_likeliest: int, normalize: bool) -> ScoreReport:
    """As ``report_tensors``, with one pass over the scores for the tokens themselves."""
    from maniple_kernels.gpu.logprobs import gather_logprobs

    own_ids = to_device(tokens, scores.device)
    scores = scores.contiguous()
    logprobs, ranks, normalizers = gather_logprobs(scores, own_ids)
    ids = torch.from_numpy(tokens.astype(np.int64))[:, None]
    if num_likeliest:
        ids = torch.cat([ids, _likeliest(scores, num_likeliest)], dim=1)
    values = scores.gather(1, ids.to(scores.device))
    if normalize:
        values -= normalizers[:, None]
        values[:, 0] = logprobs
    values = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf).cpu()
    return ScoreReport(ids.to(torch.int32).numpy(), values.numpy(), ranks.cpu().numpy())


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """Return [num_rows, count] ids on the host, the likeliest first, of equals the lower."""
    top = scores.topk(min(count + 1, scores.shape[1]), dim=1)  # which of equals it returns is not said
    values, found = top.values.cpu().numpy(), top.indices.cpu().numpy()
    places = np.repeat(np.arange(len(scores)), count)
    order = np.lexsort((found[:, :count].ravel(), -values[:, :count].ravel(), places))
    ids = found[:, :count].ravel()[order].reshape(-1, count)
    for place in np.flatnonzero(values[:, count - 1] == values[:, -1]) if values.shape[1] > count else ():
        # What comes next equals the last: the lowest ids of all that equal it are wanted.
        row = scores[place]
        candidates = (row >= float(values[place, count - 1])).nonzero().flatten()
        alone = np.zeros(len(candidates), np.int64)
        ids[place] = first_of_each(alone, candidates.cpu().numpy(), row[candidates].cpu().numpy(), count)[0]
    return torch.from_numpy(ids)
