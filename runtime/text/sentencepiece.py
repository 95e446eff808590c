"""Vocabularies of SentencePiece, by merges (BPE) or by likelihood (unigram), for the ``tokenizers`` library.

Source: SentencePiece's model.proto, whose numbers of piece types GGUF files use too.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
"""what stands for a space in a piece"""


@dataclass(frozen=True, kw_only=True)
class SentencePieces:
    """A vocabulary: ``pieces``, ``scores`` and ``types`` by id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    add_space: bool = True
    """a text begins as if a space stood before it"""
    space_after_tokens: bool = True
    """and so does what follows a token beside the merges"""
    join_spaces: bool = False
    """runs of spaces count as one, and those around a text not at all"""
    charsmap: bytes = b""
    """compiled rules of normalisation; empty: none"""

    def by_merges(self) -> tokenizers.Tokenizer:
        """Return a tokenizer that merges, of all neighbours that form a piece, the one with the best score first."""
        vocabulary = {piece: token_id for token_id, piece in enumerate(self.pieces)}
        mergeable = {p: s for p, s, kind in zip(self.pieces, self.scores, self.types) if kind in (NORMAL, UNUSED)}
        ranked: list[tuple[float, int, str, str]] = []
        for piece, score in mergeable.items():
            for at in range(1, len(piece)):
                left, right = piece[:at], piece[at:]
                if left in mergeable and right in mergeable:
                    ranked.append((-score, -at, left, right))
        ranked.sort()
        unknown = next((piece for piece, kind in zip(self.pieces, self.types) if kind == UNKNOWN), None)
        model = models.BPE(
            vocabulary,
            [(left, right) for _, _, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in self.types,
        )
        return self._around(tokenizers.Tokenizer(model))

    def by_likelihood(self) -> tokenizers.Tokenizer:
        """Return a tokenizer that takes, of all ways to cut a text, the one whose pieces score best together."""
        unknown = next((i for i, kind in enumerate(self.types) if kind == UNKNOWN), None)
        # Pieces that no text may give must not win by their score of 0.
        least = min(self.scores, default=0.0) - 10.0
        texts = (NORMAL, USER_DEFINED, UNUSED)
        scored = [(p, s if kind in texts else least) for p, s, kind in zip(self.pieces, self.scores, self.types)]
        return self._around(tokenizers.Tokenizer(models.Unigram(scored, unknown, BYTE in self.types)))

    def add_tokens(self, core: tokenizers.Tokenizer) -> None:
        """Make ``core`` read control and user-defined pieces as they are written.

        They are added in the order of ids, and are in the vocabulary already, so that they keep their ids.
        """
        core.add_tokens(
            [
                AddedToken(piece, special=kind in (CONTROL, UNKNOWN), normalized=False)
                for piece, kind in zip(self.pieces, self.types)
                if kind in (CONTROL, USER_DEFINED, UNKNOWN) and piece
            ]
        )

    def _around(self, core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Give a tokenizer what stands before and after its model, and return it."""
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.join_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.add_space and self.space_after_tokens:
            steps.append(normalizers.Prepend(SPACE))
        if self.add_space and not self.space_after_tokens:
            core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        core.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
        return core
