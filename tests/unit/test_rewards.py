"""Reward terms in one process: what they pay, against hand-made cases. The pool is in test_reward_pool.py."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import UserError
from luspo_megatron.reward import ConstantRewardWatch, RewardInput, RewardScorer, reward_violations
from luspo_megatron.reward.math import gold_answer, last_boxed
from luspo_megatron.reward.reasoning_gym import extract_answer
from luspo_megatron.reward.shape import follows_format

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k.jsonl"


def item(response: str, answer: object = "42", **fields: object) -> RewardInput:
    return RewardInput("question", response, {"answer": answer}, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def math_scorer() -> RewardScorer:
    return RewardScorer(RewardConfig())


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7", None),
        (r"\boxed{1} and then \boxed{2", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{1\}", None),
        ("42", None),
        ("\\boxed{7\\", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_gold_answer_of_worked_solutions() -> None:
    assert gold_answer("2 + 2 = 4\n#### 1,600") == "1,600"
    assert gold_answer(r"we find \boxed{\frac{3}{4}}.") == r"\frac{3}{4}"
    assert gold_answer(7) == "7"


@pytest.mark.parametrize(
    ("gold", "boxed", "reward"),
    [
        ("42", "42", 1), ("42", "41", 0), ("42", "-42", 0), ("1600", "1,600", 1), ("1/2", r"\frac{1}{2}", 1),
        (r"\frac{1}{2}", "0.5", 1), (r"\frac{1}{2}", r"\frac{2}{1}", 0), ("A", "A", 1), ("A", "B", 0),
        ("A", r"\text{A}", 1), ("C", "(C)", 1), (r"\{1,2\}", r"\{2,1\}", 1), ("(1,2)", "(2,1)", 0),
        ("x^2+1", "1+x^2", 1), ("10", "", 0), (18, r"\$18", 1), ("3", "3.0", 1), (0, "0", 1),
    ],
)  # fmt: skip
def test_math_equality(math_scorer: RewardScorer, gold: object, boxed: str, reward: float) -> None:
    result = math_scorer.score(item(f"thus \\boxed{{{boxed}}}", gold))
    assert (result.reward, result.correct, result.failed) == (reward, bool(reward), None)


def test_math_takes_the_last_box_and_nothing_but_a_box(math_scorer: RewardScorer) -> None:
    assert math_scorer.score(item(r"\boxed{41}, no: \boxed{42}")).reward == 1
    assert math_scorer.score(item(r"\boxed{42}, no: \boxed{41}")).reward == 0
    assert math_scorer.score(item(r"\boxed{42}, no: \boxed{41")).reward == 0
    assert math_scorer.score(item("the answer is 42")).reward == 0
    assert math_scorer.score(item("\\boxed{" + "42+" * 5000 + "0}")).reward == 0


def test_math_without_a_reference_answer_is_a_failure_not_a_wrong_answer(math_scorer: RewardScorer) -> None:
    assert "no answer" in str(math_scorer.score(item(r"\boxed{42}", None)).failed)


def test_math_off_the_main_thread(math_scorer: RewardScorer) -> None:
    """Time limits by SIGALRM fail off the main thread, and every reward would be 0."""
    rewards: list[float] = []

    def grade() -> None:
        rewards.append(math_scorer.score(item(r"\boxed{42}")).reward)
        rewards.append(math_scorer.score(item(r"\boxed{\frac{84}{2}}")).reward)

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert rewards == [1.0, 1.0]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"the GSM8K file is not at {GSM8K}")
def test_math_on_gsm8k(math_scorer: RewardScorer) -> None:
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:60]]
    for row in rows:
        answer = row["answer"].rpartition("#### ")[2]
        wrong = int(answer.replace(",", "")) + 1
        assert math_scorer.score(item(f"\\boxed{{{answer}}}", row["answer"])).reward == 1, row
        assert math_scorer.score(item(f"\\boxed{{{answer}.00}}", row["answer"])).reward == 1, row
        assert math_scorer.score(item(f"\\boxed{{{wrong}}}", row["answer"])).reward == 0, row
        assert math_scorer.score(item(row["answer"], row["answer"])).reward == 0, "not boxed"


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r">(-?\d+)$", "<11<9>9", "9"), (r">(-?\d+)$", ">9<", None), (r">(-?\d+)$", ">-12", "-12"),
        (r">(\d+)", ">1>2", "2"), (r"\d+", "1 2", "2"), ("", " 9\n", "9"),
    ],
)  # fmt: skip
def test_extract_answer(pattern: str, text: str, answer: str | None) -> None:
    assert extract_answer(pattern, text) == answer


def chain_sum(response: str, answer: str, **config: object) -> RewardInput:
    return RewardInput("4+7-2=", response, {"answer": answer, "task": "chain_sum", "question": "4+7-2", "metadata": {}})


def test_reasoning_gym_partial_credit_is_not_correct() -> None:
    config = RewardConfig(terms=("reasoning_gym:1.0",), answer_pattern=r">(-?\d+)$")
    graded, binary = RewardScorer(config), RewardScorer(replace(config, binary=True))
    for scorer in (graded, binary):
        right = scorer.score(chain_sum("<11<9>9", "9"))
        assert (right.reward, right.correct) == (1.0, True)
    for response in (">-9", ">19", ">90", "9", ">", "", ">9 "):
        assert graded.score(chain_sum(response, "9")).reward < 1.0, response
        assert binary.score(chain_sum(response, "9")).reward == 0.0, response
    assert graded.score(chain_sum(">-9", "9")).reward > 0.0, "the case that the threshold is for"


def test_reasoning_gym_uses_the_arguments_of_the_row_and_survives_json() -> None:
    import reasoning_gym

    scorer = RewardScorer(RewardConfig(terms=("reasoning_gym:1.0",)))
    for task, task_args in (("puzzle24", {"max_value": 5}), ("rearc", {}), ("countdown", {}), ("word_ladder", {})):
        entry = reasoning_gym.create_dataset(task, size=1, seed=3, **task_args)[0]
        row = json.loads(json.dumps({**entry, "task": task, "task_args": task_args}))
        result = scorer.score(RewardInput(entry["question"], entry["answer"], row))
        assert result.reward == 1.0, (task, result)
    # A number outside the task's own range is refused early, with another value than a wrong sum gets.
    row = {"answer": None, "task": "puzzle24", "metadata": {"numbers": [9, 9, 3, 3]}}
    narrow = scorer.score(RewardInput("q", "9 + 9 + 3 + 3", {**row, "task_args": {"max_value": 5}})).reward
    assert narrow < scorer.score(RewardInput("q", "9 + 9 + 3 + 3", {**row, "task_args": {}})).reward == 1.0
    missing = scorer.score(RewardInput("q", "9", {"answer": "9"}))
    assert "'task'" in str(missing.failed)


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        (r"<think>a</think> <answer>so \boxed{4}</answer>", True),
        ("<think>a\nb</think>\n<answer>\n\\boxed{\\frac{1}{2}} </answer>\n", True),
        (r"<think>a</think><answer>4</answer>", False),
        (r"<think>a</think> <answer>\boxed{4</answer>", False),
        (r"well <think>a</think> <answer>\boxed{4}</answer>", False),
        (r"<think>a</think> <answer>\boxed{4}</answer> bye", False),
        (r"<think>a</think> so <answer>\boxed{4}</answer>", False),
        (r"<think>\boxed{4}</think> <answer>4</answer>", False),
        (r"<think>a</think><think>b</think> <answer>\boxed{4}</answer>", False),
        (r"<answer>\boxed{4}</answer> <think>a</think>", False),
        ("", False),
    ],
)
def test_format(text: str, follows: bool) -> None:
    assert follows_format(text) is follows
    assert RewardScorer(RewardConfig(terms=("format:1.0",))).score(item(text)).reward == (0.5 if follows else 0.0)


def test_format_hears_a_think_tag_opened_by_the_chat_template() -> None:
    scorer = RewardScorer(RewardConfig(terms=("format:1.0",)))
    response = r"a</think> <answer>\boxed{4}</answer>"
    assert scorer.score(RewardInput("user: 2+2 assistant: <think>\n", response)).reward == 0.5
    assert scorer.score(RewardInput("user: 2+2 assistant:", response)).reward == 0.0


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (28672, 0.0), (28673, -0.3 / 4096), (30720, -0.15), (32768, -0.3)]
)
def test_overlong_by_hand(length: int, penalty: float) -> None:
    """L_max 32768, L_buf 4096, factor 0.3: the paper's text setting."""
    scorer = RewardScorer(RewardConfig(terms=("overlong:1.0",), overlong_buffer=4096))
    result = scorer.score(item("", response_length=length, max_response_tokens=32768))
    assert result.reward == pytest.approx(penalty, abs=1e-12)


def test_weighted_sum_parts_and_correct() -> None:
    config = RewardConfig(terms=("format:1.0", "math:2.0", "overlong:0.5"), correct_term="math", overlong_buffer=10)
    response = item(r"<think>a</think> <answer>\boxed{42}</answer>", response_length=15, max_response_tokens=20)
    result = RewardScorer(config).score(response)
    assert result.parts == {"format": 0.5, "math": 1.0, "overlong": pytest.approx(-0.15)}
    assert result.reward == pytest.approx(0.5 + 2.0 - 0.075)
    assert result.correct
    assert not RewardScorer(replace(config, correct_term="format")).score(response).correct  # 0.5 < threshold 1


def half(item: RewardInput) -> float:
    return float("nan") if item.row["answer"] == "nan" else 0.5


class Weighted:
    def __init__(self, config: RewardConfig) -> None:
        self.factor = config.overlong_factor

    def score(self, item: RewardInput) -> float:
        if item.response_text == "boom":
            raise ZeroDivisionError("by zero")
        return self.factor * len(item.response_text)


not_a_reward = 3


def test_plugins() -> None:
    config = RewardConfig(terms=(f"{__name__}:half:2.0", f"{__name__}:Weighted:1.0"), overlong_factor=0.25)
    scorer = RewardScorer(config)
    assert scorer.score(item("abcd")).reward == 2.0
    failed = scorer.score(item("boom"))
    assert failed.reward == 0.0 and set(failed.parts.values()) == {0.0} and not failed.correct
    assert str(failed.failed).startswith("error in") and "by zero" in str(failed.failed)
    assert "nan" in str(scorer.score(item("a", "nan")).failed)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (("no_such_module_here:score:1.0",), "no_such_module_here"),
        ((f"{__name__}:missing:1.0",), "missing"),
        ((f"{__name__}:not_a_reward:1.0",), "neither a function"),
        (("mth:1.0",), "did you mean 'math'"),
        (("math",), "math:1.0"),
        (("math:inf",), "weight"),
        (("math:1", "math:2"), "twice"),
        ((), "empty"),
    ],
)
def test_wrong_terms(terms: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardScorer(RewardConfig(terms=terms))


def test_every_violation_is_listed() -> None:
    config = RewardConfig(
        terms=("overlong:1", "nope:1"), correct_term="math", answer_pattern="(", workers=0, timeout=0, memory_mb=-1
    )
    text = "\n".join(reward_violations(config))
    for name in ("nope", "correct_term", "overlong_buffer", "answer_pattern", "workers", "timeout", "memory_mb"):
        assert name in text
    too_wide = replace(RewardConfig(), terms=("overlong:1",), overlong_buffer=50)
    assert reward_violations(too_wide) == [] and "max_response_tokens" in reward_violations(too_wide, 40)[0]


def test_constant_rewards_are_told_loudly() -> None:
    watch = ConstantRewardWatch(3)
    assert [watch.observe([0.0, 0.0]) for _ in range(2)] == [None, None]
    warning = watch.observe([0.0, 0.0])
    assert warning is not None and "3 steps" in warning and "doctor" in warning
    assert [watch.observe([0.5, 0.5]) is None for _ in range(3)] == [True, True, False], "again after k more"
    assert watch.observe([0.0, 1.0]) is None and watch.constant_steps == 0
    assert watch.observe([1.0, 1.0]) is None and watch.observe([1.0, 1.0 + 1e-12]) is None
    assert watch.observe([]) is None and watch.constant_steps == 2, "a step without rewards says nothing"
