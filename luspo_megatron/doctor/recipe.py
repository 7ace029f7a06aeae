"""Checks of a configuration's own inputs: tokenizer, template, prompts, reward, and the model against its checkpoint.

The reward is graded on the data set's own answers, which must count as correct, and on wrong ones, which must not: a
reward that is always 0 (or always 1) trains nothing and looks like a hard task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from luspo_megatron.config import Config
from luspo_megatron.data.prompts import load_prompts
from luspo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from luspo_megatron.doctor.lines import Line, error, guarded, ok, warning
from luspo_megatron.reward.base import RewardInput
from luspo_megatron.reward.math import gold_answer
from luspo_megatron.reward.scorer import RewardScorer
from luspo_megatron.types import Prompt
from luspo_megatron.weights.architecture import read_architecture
from luspo_megatron.weights.table import WeightTable

GRADED = 64  # prompts whose answers are graded


def recipe_lines(config: Config) -> Iterator[Line]:
    """Every check of the configuration's inputs; what depends on a failed one is left out."""
    yield from guarded("checkpoint", lambda: checkpoint(config))
    tokenizers: list[TextTokenizer] = []
    yield from guarded("tokenizer", lambda: tokenizer_lines(config, tokenizers))
    if not tokenizers:
        return
    [tokenizer] = tokenizers
    yield from guarded("chat template", lambda: chat_template(config, tokenizer))
    for split in ("prompts", "eval_prompts"):
        if getattr(config.data, split):
            prompts: list[Prompt] = []
            yield from guarded(split, lambda s=split, p=prompts: prompt_lines(config, tokenizer, s, p))  # type: ignore[misc]
            if prompts:
                yield from guarded(f"reward ({split})", lambda s=split, p=prompts: reward_lines(config, s, p))  # type: ignore[misc]


def checkpoint(config: Config) -> Iterator[Line]:
    """config.json against the tensors on disk, by name and shape; no weights are read."""
    from luspo_megatron.weights.load import HfCheckpoint

    arch = read_architecture(config.model.hf, config.model.family)
    table = WeightTable(arch)
    yield ok("model", f"{arch.family}, {arch.num_layers} layers, rope theta {arch.rope_theta:g}, context "
             f"{arch.max_positions}")
    HfCheckpoint(config.model.hf).check(table)
    yield ok("checkpoint", f"{len(table.hf_shapes)} tensors have the names and shapes of config.json")


def tokenizer_lines(config: Config, out: list[TextTokenizer]) -> Iterator[Line]:
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.hf, config.model.hf)
    out.append(tokenizer)
    arch = read_architecture(config.model.hf, config.model.family)
    names = ", ".join(f"{i} {tokenizer.hf.convert_ids_to_tokens(i)!r}" for i in tokenizer.eos_ids)
    if len(tokenizer.hf) > arch.vocab_size:
        yield error("tokenizer", f"has {len(tokenizer.hf)} tokens, the model's vocabulary {arch.vocab_size}",
                    "take the model's own tokenizer")
    elif outside := [i for i in tokenizer.eos_ids if i >= arch.vocab_size]:
        yield error("tokenizer", f"eos ids {outside} are outside the vocabulary", "mend generation_config.json")
    else:
        yield ok("tokenizer", f"{len(tokenizer.hf)} tokens; a response ends with {names}")


def chat_template(config: Config, tokenizer: TextTokenizer) -> Iterator[Line]:
    """What the template writes must be read back as the same tokens, and must not repeat the BOS."""
    if not tokenizer.hf.chat_template:
        line = error("chat template", "there is none", "data.chat_template=false, or a tokenizer that has one")
        yield line if config.data.chat_template else ok("chat template", "none, and none is wanted")
        return
    text, ids = tokenizer.render_chat([{"role": "user", "content": "What is 1 + 1?"}])
    back = tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    bos = tokenizer.hf.bos_token_id
    if back != text:
        yield error("chat template", f"its text does not survive tokenization: {back[-60:]!r}", "check the tokenizer")
    elif bos is not None and ids[:2] == [bos, bos]:
        yield error("chat template", "writes the BOS twice", "mend the template")
    elif not config.data.chat_template:
        yield warning("chat template", "is there and not used for string prompts", "data.chat_template=true for chat "
                      "models; a base model does without")
    else:
        yield ok("chat template", f"round trip of {len(ids)} tokens; opens with ...{text[-40:]!r}")


def prompt_lines(config: Config, tokenizer: TextTokenizer, split: str, out: list[Prompt]) -> Iterator[Line]:
    name = "train" if split == "prompts" else "eval"
    prompts = load_prompts(config.data, tokenizer, name, config.run.seed)  # type: ignore[arg-type]
    out.extend(prompts)
    lengths = sorted(len(prompt.prompt_ids) for prompt in prompts)
    text = (f"{len(prompts)} prompts, {lengths[len(lengths) // 2]} tokens at the median, {lengths[-1]} the longest; "
            f"{prompts.filtered} longer than data.max_prompt_tokens left out")
    share = prompts.filtered / (len(prompts) + prompts.filtered)
    yield warning(split, text, "raise data.max_prompt_tokens") if share > 0.05 else ok(split, text)


def reward_lines(config: Config, split: str, prompts: Sequence[Prompt]) -> Iterator[Line]:
    """The correct term on answers that are right, and on others' answers."""
    name = f"reward ({split})"
    scorer = RewardScorer(config.reward)
    if scorer.correct_term not in ("math", "reasoning_gym"):
        yield warning(name, f"{scorer.correct_term} is not graded here: what a right answer looks like is its own",
                      "grade a few responses by hand")
        return
    chosen = prompts[:: max(1, len(prompts) // GRADED)][:GRADED]
    right, wrong = 0, 0
    failures: list[str] = []
    for prompt in chosen:
        answer = gold_answer(prompt.row["answer"])
        good, bad = (_grade(config, scorer, prompt, text) for text in (answer, wrong_answer(answer)))
        right += good
        wrong += bad
        if not good:
            failures.append(answer[:60])
    text = f"{scorer.correct_term}: {right} of {len(chosen)} own answers are correct, {wrong} wrong ones are"
    if right < len(chosen):
        yield error(name, f"{text}; not: {failures[:3]}", "check data.answer_key and reward.answer_pattern; drop rows "
                    "that cannot be graded")
    elif wrong:
        yield error(name, text, "the reward takes wrong answers for right; see reward.correct_threshold")
    else:
        yield ok(name, text)


def _grade(config: Config, scorer: RewardScorer, prompt: Prompt, answer: str) -> bool:
    response = response_with(answer, scorer.correct_term, config.reward.answer_pattern)
    return scorer.score(RewardInput(prompt.text, response, prompt.row, 1, False,
                                    config.rollout.max_response_tokens)).correct


def response_with(answer: str, term: str, pattern: str) -> str:
    """A response whose answer is ``answer``, in the form that the term reads."""
    if term == "math":
        return f"<think>made up</think> <answer>\\boxed{{{answer}}}</answer>"
    if not pattern:
        return answer
    return re.sub(r"\((?!\?)[^)]*\)", lambda _: answer, pattern).rstrip("$").lstrip("^")


def wrong_answer(answer: str) -> str:
    """Another answer of the same kind: the next number, or a text that nobody gives."""
    return str(int(answer) + 1) if re.fullmatch(r"-?\d+", answer) else "987654321"
