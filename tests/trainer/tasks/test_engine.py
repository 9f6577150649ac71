"""The decode engine against its slow twin: in any batch, any chunks, any cache and any layout the same tokens."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from unittest import mock

import pytest
import torch

from mdata import DamageError, UsageError
from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.helpers.ties import Ties
from tests.reference.whole_context import continue_row
from tests.trainer.shapes import GPT2, LLAMA
from trainer.kernels.scores import ScoreShape
from trainer.layers.shapes import LatentShape, MixerShape, MoEShape, RopeShape
from trainer.models.family import family_named
from trainer.models.float8_layers import keep_float8_weights
from trainer.models.mamba.shape import MambaShape
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.tasks import decoder
from trainer.tasks.engine import DecodeEngine, Load, Request
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

CONTEXT, END = 48, 11
BASE = replace(LLAMA, max_position=CONTEXT)
MIXER = MixerShape(width=32, num_heads=8, head_dim=8, num_groups=4, state_size=5, chunk_size=8)


def hybrid(pattern, position):
    """A model of mixers, whose states are of rows, and of attention."""
    same = {field.name: getattr(BASE, field.name) for field in fields(BASE)}
    same |= {"num_layers": len(pattern), "position": position, "num_kv_heads": 4}
    return MambaShape(**same, pattern=pattern, mixer=MIXER)


# Rows of more than 20 tokens turn otherwise, also those that grow beyond: the twin computes them anew.
LONGROPE = RopeShape(
    scaling="longrope", factor=4.0, original_length=20, short_factors=(1.0,) * 4, long_factors=(1.5, 3.0) * 2
)
LATENT = LatentShape(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
SHAPES = {
    "latent": replace(BASE, num_kv_heads=4, head_dim=12, mla=LATENT, scores=ScoreShape(scale=0.3)),
    "latent in a window": replace(
        BASE,
        num_kv_heads=4,
        head_dim=12,
        mla=replace(LATENT, q_lora_rank=0, v_head_dim=14),
        scores=ScoreShape(scale=0.3, window=6, sinks="learned"),
    ),
    "llama": BASE,
    "gpt2": replace(GPT2, max_position=CONTEXT),
    "one key-value head": replace(BASE, num_kv_heads=1, qk_norm=True),
    "window": replace(BASE, scores=ScoreShape(window=5)),
    "window and whole": replace(BASE, num_layers=3, window_interval=3, scores=ScoreShape(window=7, softcap=3.0)),
    "alibi": replace(BASE, position="alibi", scores=ScoreShape(alibi=True)),
    "sinks": replace(BASE, rope_interval=2, scores=ScoreShape(window=6, sinks="learned", scale=0.5)),
    "longrope": replace(BASE, rope=LONGROPE, scores=ScoreShape(window=9)),
    "mixers": hybrid("MM", "none"),
    "hybrid": hybrid("M*-M", "rope"),
    "experts": replace(BASE, moe=MoEShape(num_experts=6, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=16)),
    "no positions": replace(BASE, position="none", scores=ScoreShape(sinks="zero"), logit_softcap=4.0),
}
GREEDY = Sampling(greedy=True)
RULES = (
    GREEDY,
    Sampling(temperature=1.0, top_k=7, top_p=0.9, seed=5),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.5, min_p=0.01, seed=6),
    Sampling(logit_bias={3: 2.0, 4: -math.inf}, temperature=1.5, min_tokens=3),
    Sampling(top_p_decay=0.9, top_p_bound=0.1, blocked_after={9: (1, 2, 3)}, ignore_eod=True),
)


SAMPLE = Request("n", [1, 2], RULES[1], max_tokens=6, sample=1)


def make_model(context, name="llama", *, pp=1):
    world = context.join(Mesh(context.world, context.world // pp, pp=pp))
    tp, shape = world.groups["tp"], SHAPES[name]
    place = Place(tp_rank=tp.rank, tp_size=tp.size, stage=world.groups["pp"].rank, num_stages=pp, ends_apart=pp > 1)
    family = family_named("mamba" if isinstance(shape, MambaShape) else "gpt")
    module = family.build(shape, place, groups={"tp": tp}, dtype=torch.float32, device=world.device)
    named = dict(module.named_parameters())
    for spec in family.parameters(shape, module.place):
        initialize_([ElementRange(spec, 0, spec.numel, named[spec.name].data.view(-1))], seed=3)
    sizes = {"vocab_size": shape.vocab_size, "rows": shape.vocab_size, "context": CONTEXT}
    return Model(module=module, world=world, ends=frozenset((END,)), **sizes)


def requests(count):
    """Ragged ones: prompts of 1 to 30 tokens, 1 to 17 new ones, every rule."""
    made = []
    for i in range(count):
        prompt = [(7 * i + 3 * j + j * j) % 250 for j in range(1 + (i * 11) % 30)]
        made.append(Request(str(i), prompt, RULES[i % len(RULES)], max_tokens=1 + (5 * i + 12) % 17, number=i))
    return made


def drawn_requests(chance, count):
    """Of any rules, lengths and reports; some drop their oldest tokens when the context is full."""
    pick, made = chance.choice, []
    for number in range(count):
        sliding, new = chance.random() < 0.15, chance.randint(1, 17)
        longest = CONTEXT + 12 if sliding else CONTEXT + 1 - new
        rules = Sampling(
            greedy=chance.random() < 0.2,
            temperature=pick((0.0, 0.5, 1.0, 3.0)),
            top_k=pick((0, 0, 1, 7, 10**6)),
            top_p=pick((1.0, 0.9, 0.2)),
            min_p=pick((0.0, 0.0, 0.05, 1.0)),
            repetition_penalty=pick((1.0, 1.0, 0.5, 1.3)),
            presence_penalty=pick((0.0, 0.0, -1.0, 0.7)),
            frequency_penalty=pick((0.0, 0.0, -0.3, 0.7)),
            logit_bias={token: pick((-math.inf, 3.0, -3.0)) for token in chance.sample(range(250), pick((0, 0, 3)))},
            blocked_after=dict.fromkeys(chance.sample(range(250), pick((0, 0, 50))), (1, 2, END)),
            min_tokens=pick((0, 0, 5)),
            ignore_eod=chance.random() < 0.3,
            top_p_decay=pick((0.0, 0.0, 0.8)),
            top_p_bound=pick((0.0, 0.1)),
            seed=number % 3,
        )
        length = pick((1, chance.randint(1, longest), longest))
        made.append(
            Request(
                str(number),
                chance.choices(range(250), k=length),
                rules,
                max_tokens=new,
                top_logprobs=pick((0, 1, 300)),
                echo=not sliding and chance.random() < 0.2,
                number=pick((number, 7)),
                sample=pick((0, 0, 1, 4)),
                sliding=sliding,
            )
        )
    return made


def run(engine, asked=(), *, check=lambda: None, arrives=lambda: True):
    """(tokens, log probabilities, finish) of each id."""
    found, steps, left = {}, 0, list(asked)
    while left or engine.busy:
        while left and arrives():
            engine.add(left.pop(0))
        for token in engine.step():
            tokens, log_probs, finish = found.setdefault(token.id, ([], [], []))
            if not token.prompt and token.token >= 0:
                tokens.append(token.token)
                log_probs.append(token.logprob)
            finish += [token.finish] if token.finish else []
        check()
        steps += 1
        assert steps < 5000, "the engine does not end"
    return found


def twins(model, asked):
    return {
        request.id: continue_row(
            model,
            request.prompt,
            request.sampling,
            max_tokens=request.max_tokens,
            number=request.number,
            sample=request.sample,
        )
        for request in asked
    }


def compare(found, twins):
    assert found.keys() == twins.keys()
    ties = Ties()
    for key, twin in twins.items():
        common = ties.common(found[key][0], twin.tokens, gap=twin.gap, row=key)
        assert found[key][1][:common] == pytest.approx(twin.log_probs[:common], abs=1e-4)
        assert len(found[key][2]) == 1, "it ends once"
    ties.check()


def _against_twin(context, name):
    model, asked = make_model(context, name), requests(16 if name == "llama" else 5)
    wanted = twins(model, asked)
    for batch, chunk, page in ((1, 512, 16), (3, 7, 2), (16, 64, 4)):
        engine = DecodeEngine(model, max_batch=batch, prefill_chunk=chunk, page_tokens=page)
        compare(run(engine, asked), wanted)
        assert engine.load() == Load(0, 0, 0, engine.load().pages)
    engine = DecodeEngine(model, cache_tokens=60, max_batch=4, page_tokens=4)
    assert engine.cache_tokens == (0 if name == "mixers" else 60) and engine.cache_bytes > 0
    engine._lags = True  # as on a GPU: tokens of a step are read while the next one runs
    compare(run(engine, asked), wanted)
    return {reason for *_, (reason,) in run(DecodeEngine(model, max_batch=16), asked).values()}


@pytest.mark.parametrize("name", soaked(SHAPES, but=set(SHAPES) - {"gpt2", "latent", "window", "longrope", "mixers"}))
def test_the_tokens_are_those_of_the_whole_context(name):
    assert run_ranks(_against_twin, 1, name)[0] == {"length", "stop"} or name != "llama"


class Replay:
    """A decoder's recording without a GPU: padded rows, and inputs of fixed sizes."""

    def __init__(self, decoder, size, width):
        self.decoder, self.size, self.width = decoder, size, width
        self.tokens = torch.zeros(size, dtype=torch.int64)

    def replay(self, tokens, inputs):
        self.tokens[: len(tokens)] = tokens
        return self.decoder._decode(self.tokens, inputs, size=self.size, width=self.width)


def _padded(context, name):
    model, asked = make_model(context, name), requests(7)
    engine = DecodeEngine(model, max_batch=6, page_tokens=4)
    engine._decoder.records = True
    with mock.patch.object(decoder, "_Recording", Replay):
        compare(run(engine, asked), twins(model, asked))
    return sorted(engine._decoder._recorded)


@pytest.mark.parametrize(("name", "ranks"), [("gpt2", 1), ("window and whole", 1), ("gpt2", 2), ("hybrid", 1)])
def test_padded_rows_change_nothing(name, ranks):
    for sizes in run_ranks(_padded, ranks, name):
        assert {1, 2, 4, 6} >= set(sizes) >= {2, 4, 6}


def _warmed_up(context, name):
    model, asked = make_model(context, name), requests(7)
    engine = DecodeEngine(model, max_batch=6, page_tokens=4, prefill_chunk=10, cache_tokens=100)
    engine._decoder.records = True
    with (
        mock.patch.object(decoder, "_Recording", Replay),
        mock.patch.object(engine._decoder, "prefill", wraps=engine._decoder.prefill) as prefill,
    ):
        engine.warm_up()
        assert engine.load()[:3] == (0, 0, 0) and not engine.busy
        sizes = sorted(engine._decoder._recorded)
        most = max(sum(map(len, call.args[2])) for call in prefill.call_args_list)
        compare(run(engine, asked), twins(model, asked))
    tiny = DecodeEngine(model, cache_tokens=1, page_tokens=1)
    tiny.warm_up()  # a row of one token has no place for a second one
    return sizes, most


@pytest.mark.parametrize("name", ["gpt2", "hybrid"])
def test_warming_up_takes_all_sizes_and_changes_no_text(name):
    assert run_ranks(_warmed_up, 1, name)[0] == ([1, 2, 4, 6], 4 * 10)


class Wrong(Replay):
    """A recording that gives something else, or that cannot be made, on the last rank alone."""

    def __init__(self, decoder, size, width):
        super().__init__(decoder, size, width)
        self.is_wrong = decoder.model.world.rank + 1 == decoder.model.world.world_size
        if self.is_wrong and decoder.model.world.world_size == 4:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def replay(self, tokens, inputs):
        logits_BV = super().replay(tokens, inputs)
        return 3 * logits_BV if self.is_wrong else logits_BV


def _without_graphs(context, pp):
    model, asked = make_model(context, "gpt2", pp=pp), requests(3)
    engine = DecodeEngine(model, max_batch=6, page_tokens=4)
    engine._decoder.records = True
    with mock.patch.object(decoder, "_Recording", Wrong), pytest.warns(RuntimeWarning) as told:
        found = run(engine, asked)
    assert not engine._decoder.records
    return str(told[0].message), {key: tokens for key, (tokens, *_) in found.items()}


@pytest.mark.parametrize(
    ("ranks", "pp", "reason"), [(2, 1, "a logit differs by"), (4, 2, "recording fails: operation")]
)
def test_a_recording_that_fails_on_one_rank_is_used_by_none(ranks, pp, reason):
    results = run_ranks(_without_graphs, ranks, pp)
    assert f"without CUDA graphs, and slower: {reason}" in results[-1][0]
    assert all("another rank cannot use them" in text for text, _ in results[:-1])
    assert all(tokens == results[0][1] for _, tokens in results)


def _little_cache(context, name):
    model = make_model(context, name)
    asked = [request._replace(prompt=request.prompt[:9], max_tokens=25) for request in requests(10)]
    engine = DecodeEngine(model, cache_tokens=CONTEXT, max_batch=16, prefill_chunk=8, page_tokens=4)
    most, preempted = 0, 0

    def check():
        nonlocal most, preempted
        load = engine.load()
        most = max(most, load.running)
        assert load.pages_used <= load.pages
        preempted += any(len(row.tokens) > len(row.request.prompt) for row in engine._waiting)

    compare(run(engine, asked, check=check), twins(model, asked))
    return engine.load().pages_used, most > 1, preempted > 0


@pytest.mark.parametrize("name", ["llama", "window and whole", "hybrid"])
def test_a_cache_that_is_ten_times_too_small_gives_the_same_texts(name):
    assert run_ranks(_little_cache, 1, name) == [(0, True, True)], "several rows ran, and some were preempted"


def _come_and_go(context):
    model, asked = make_model(context), requests(9)
    wanted, found = twins(model, asked), {}
    engine = DecodeEngine(model, max_batch=4, prefill_chunk=8, page_tokens=4)
    for i, request in enumerate(asked):
        engine.add(request._replace(max_tokens=25 if i == 2 else request.max_tokens))
        for token in engine.step():
            found.setdefault(token.id, []).append(token)
    engine.cancel("2")
    engine.cancel("nobody")
    assert engine.busy
    while engine.busy:
        for token in engine.step():
            found.setdefault(token.id, []).append(token)
    last = found.pop("2")[-1]
    assert (last.token, last.finish) == (-1, "cancelled") and engine.load()[:3] == (0, 0, 0)
    for id, tokens in found.items():
        assert [token.token for token in tokens] == wanted[id][0]


def test_rows_come_go_and_are_cancelled():
    run_ranks(_come_and_go, 1)


def _at_random(context, seeds):
    """Requests come and are cancelled at any time, under a cache that is too small."""
    model = make_model(context, "window and whole")
    pool = [request._replace(prompt=request.prompt[:12], max_tokens=12) for request in requests(9)]
    wanted, preempted = twins(model, pool), 0
    for seed in seeds:
        draw = random.Random(seed)
        engine = DecodeEngine(model, cache_tokens=draw.choice((24, 48)), max_batch=4, prefill_chunk=8, page_tokens=4)
        engine._lags = bool(seed % 2)
        found, left, cancelled = {}, draw.sample(pool, len(pool)), set()
        while left or engine.busy:
            if left and draw.random() < 0.4:
                engine.add(left.pop())
            if draw.random() < 0.1:
                engine.cancel(draw.choice(pool).id)
            for token in engine.step():
                assert token.id not in cancelled, "nothing comes after the news"
                if token.finish == "cancelled":
                    cancelled.add(token.id)
                else:
                    found.setdefault(token.id, []).append(token.token)
            preempted += any(row.num_new for row in engine._waiting)
        assert engine.load()[:3] == (0, 0, 0)
        for key, tokens in found.items():
            most = len(tokens) if key in cancelled else None
            assert tokens == wanted[key][0][:most], (seed, key)
        assert found.keys() | cancelled == wanted.keys()
    return preempted > 0


SOAK = [pytest.mark.soak, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=SOAK)])
def test_requests_that_come_and_go_at_random_times(seeds):
    assert run_ranks(_at_random, 1, seeds, timeout_s=1200) == [True], "some rows were preempted"


def _scored(context, pp):
    model, prompt = make_model(context, pp=pp), [5, 9, 100, 7, 7, 30, 2]
    rules = Sampling(greedy=True, logit_bias={9: 1.5})
    scores = model.score([prompt], top=3, bias=rules.logit_bias)
    asked = Request("x", prompt, rules, max_tokens=2, top_logprobs=3, echo=True)
    for chunk in (3, 512):
        engine = DecodeEngine(model, prefill_chunk=chunk, page_tokens=4)
        engine.add(asked)
        told = [token for _ in range(20) for token in engine.step()]
        given = [token for token in told if token.prompt]
        assert [token.token for token in given] == prompt
        assert math.isnan(given[0].logprob) and given[0].top == []
        for place, token in enumerate(given[1:]):
            assert token.logprob == pytest.approx(float(scores.log_prob_BS[0, place]), abs=1e-5)
            assert [i for i, _ in token.top] == scores.top_BSN[1][0, place].tolist()
        new = [token for token in told if not token.prompt]
        tokens, log_probs, _ = continue_row(model, prompt, rules, max_tokens=2)
        assert [token.token for token in new] == tokens
        assert [token.logprob for token in new] == pytest.approx(log_probs, abs=1e-5)
        assert all(len(token.top) == 3 and token.top[0][0] == token.token for token in new)
        engine.add(asked._replace(max_tokens=0))
        (*_, last) = [token for _ in range(8) for token in engine.step()]
        assert last.prompt and last.finish == "length" and not engine.busy


@pytest.mark.parametrize(("ranks", "pp"), [(1, 1), (4, 2)])
def test_prompts_are_scored_on_the_way(ranks, pp):
    run_ranks(_scored, ranks, pp)


def _layout(context, name, pp, lags=False):
    model, asked = make_model(context, name, pp=pp), requests(8)
    engine = DecodeEngine(model, cache_tokens=96, max_batch=6, prefill_chunk=16, page_tokens=4)
    engine._lags = lags
    found = run(engine, [*asked, SAMPLE])
    return {key: (tokens, log_probs) for key, (tokens, log_probs, _) in found.items()}


def _gap(context, name, key, place):
    """How near the choice of a token was, which two layouts made differently."""
    return twins(make_model(context, name), [*requests(8), SAMPLE])[key].gap(place)


@pytest.mark.parametrize("name", soaked(["llama", "gpt2", "window and whole", "latent", "hybrid"], but=["latent"]))
def test_every_layout_gives_the_same_tokens(name):
    (alone,) = run_ranks(_layout, 1, name, 1)
    ties = Ties()
    for ranks, pp in ((2, 1), (4, 1), (2, 2), (4, 2)):
        for found in run_ranks(_layout, ranks, name, pp, ranks == 4):
            assert found.keys() == alone.keys()
            for key, (tokens, log_probs) in alone.items():

                def gap(place, key=key):
                    return run_ranks(_gap, 1, name, key, place)[0]

                common = ties.common(found[key][0], tokens, gap=gap, row=(ranks, pp, key))
                assert found[key][1][:common] == pytest.approx(log_probs[:common], abs=1e-4)
    ties.check()


def _refusals(context):
    model = make_model(context)
    engine = DecodeEngine(model, cache_tokens=20, max_batch=2, page_tokens=4)
    assert engine.capacity == 20
    engine.add(Request("a", [1], GREEDY, max_tokens=3))
    for request, text in (
        (Request("b", [], GREEDY, max_tokens=1), "the prompt has no tokens"),
        (Request("b", [250], GREEDY, max_tokens=1), "token 250 is outside the vocabulary"),
        (Request("b", [1] * 49, GREEDY, max_tokens=1), "49 tokens of the prompt and 1 new"),
        (
            Request("b", [1] * 10, GREEDY, max_tokens=12),
            "the KV cache\n  found: 10 tokens of the prompt and 12 new ones\n  expected: at most 21 together",
        ),
        (Request("b", [1], GREEDY, max_tokens=0), "max_tokens=0"),
        (Request("b", [1], Sampling(top_p=2.0), max_tokens=1), "top_p=2"),
        (Request("a", [1], GREEDY, max_tokens=1), "'a' is open already"),
    ):
        with pytest.raises(UsageError, match=text):
            engine.add(request)
    assert engine.load()[:2] == (0, 1), "what was refused has left nothing"
    engine.add(Request("b", [1] * 10, GREEDY, max_tokens=11))
    for options in ({"max_batch": 0}, {"cache_tokens": 0}):
        with pytest.raises(UsageError, match="is below 1"):
            DecodeEngine(model, **options)
    with torch.no_grad():
        model.module.head.weight.fill_(math.nan)
    with pytest.raises(DamageError, match="logits are not numbers"):
        run(engine)


def test_what_cannot_be_answered_is_refused():
    run_ranks(_refusals, 1)


def _thousand(context):
    model, asked = make_model(context, "window and whole"), requests(1000)
    wanted = twins(model, asked)
    engine = DecodeEngine(model, cache_tokens=150, max_batch=32, prefill_chunk=32, page_tokens=4)
    compare(run(engine, asked), wanted)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_thousand_requests_under_a_little_cache():
    run_ranks(_thousand, 1, timeout_s=1200)


def _float8(context, name):
    model, asked = make_model(context, name), Request("x", [5, 9, 100, 7, 7, 30, 2], GREEDY, max_tokens=2)
    keep_float8_weights(model.module, device=torch.device("cpu"))
    _, log_probs, _ = continue_row(model, asked.prompt, asked.sampling, max_tokens=asked.max_tokens)
    ((_, found, _),) = run(DecodeEngine(model, page_tokens=4), [asked]).values()
    assert found == pytest.approx(log_probs, abs=0.02)  # the whole context rounds latents, too


@pytest.mark.parametrize("name", ["latent", "experts"])
def test_latents_and_experts_are_multiplied_by_weights_in_fp8(name):
    run_ranks(_float8, 1, name)


def _beam(context, name):
    """Beams that part, die out and go on together; each has the logits of its own text."""
    model, prompt = make_model(context, name), [5, 6, 7, 8, 9]
    cache, rows = decoder.BeamCache(model, prompt, width=3, max_tokens=6), [[]]
    cache.logits(rows, [0])
    for parents in ([0, 0, 0], [2, 0, 0], [1, 1, 2], [2, 1, 0]):
        rows = [[*rows[parent], 20 + 7 * place + parent] for place, parent in enumerate(parents)]
        logits_BV = cache.logits(rows, parents)
        for row, logits_V in zip(rows, logits_BV, strict=True):
            torch.testing.assert_close(logits_V, model.logits([*prompt, *row])[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["hybrid", "window and whole"])
def test_beams_have_the_states_of_their_parents(name):
    run_ranks(_beam, 1, name)
