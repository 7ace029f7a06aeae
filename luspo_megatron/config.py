"""The configuration: frozen dataclasses, one default per setting, no torch.

Every field has a docstring; it is the text of ``luspo train --help``. YAML files are saved flags (cli.py): the key
``optimizer: {lr: 1e-6}`` is the flag ``--optimizer.lr 1e-6``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Objective = Literal["luspo", "gspo", "grpo", "drgrpo", "dapo", "cispo"]


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/luspo"
    """The run folder: logs, metrics, checkpoints, report. Nothing is written outside it."""
    seed: int = 0
    """Seed of data order, sampling and initialisation."""
    steps: int = 100
    """Rollout steps to train for (one step = one rollout and all its mini-batch updates)."""
    resume: bool = True
    """Continue from the newest checkpoint in the run folder; without one, start anew."""
    tensorboard: bool = True
    """Write TensorBoard event files to <run.dir>/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (pip install wandb); offline runs are uploaded by `wandb sync <run.dir>/wandb/offline-run-*`."""
    wandb_project: str = "luspo"
    """Project of the Weights & Biases run."""
    prometheus_port: int = 0
    """Port of an endpoint that Prometheus reads (pip install prometheus_client); 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that the endpoint listens on; 0.0.0.0 lets other machines read it."""
    sample_table_every: int = 10
    """Print and record a few samples every so many steps; 0 turns it off."""


@dataclass(frozen=True)
class ModelConfig:
    hf: str = ""
    """Folder of the Hugging Face model to start from (config.json, safetensors, tokenizer)."""
    megatron: str = ""
    """Folder of a Megatron checkpoint (torch_dist) to take the starting weights from, e.g. one that
    tools/checkpoint_convert wrote; empty: the weights of model.hf. Engines start from model.hf in any case."""
    family: str = ""
    """Model family where config.json does not say it: qwen3, qwen3_moe, qwen2, llama, mistral, or module:attribute."""
    tokenizer: str = ""
    """Folder of the tokenizer; empty: the model's folder."""
    ref_hf: str = ""
    """Folder of the reference policy for the KL term; empty: the starting weights. Used when algorithm.kl_coef > 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter dtype of the actor and of the engine."""
    transformer_engine: Literal["auto", "on", "off"] = "auto"
    """Layer spec on CUDA: Transformer Engine where importable (auto), required (on), or megatron's local spec (off)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    router_aux_loss_coef: float = 0.0
    """MoE load-balancing loss; 0 turns it off. Where on, it depends on the micro-batch split."""
    trainable: Literal["all", "no_router"] = "all"
    """Which parameters train; no_router freezes the MoE routers."""


@dataclass(frozen=True)
class ParallelConfig:
    world_size: int = 1
    """Trainer processes. A local run starts them; under torchrun or srun it must equal WORLD_SIZE."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size (1F1B)."""
    ep: int = 1
    """Expert parallel size (alltoall)."""
    etp: int = 0
    """Expert tensor parallel size; 0: 1 for MoE models when ep > 1, else tp."""
    cp: int = 1
    """Context parallel size; only 1 is supported yet."""
    sequence_parallel: bool = True
    """Sequence parallelism; only acts when tp > 1. MoE training with tp > 1 requires it."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    timeout_minutes: float = 120.0
    """Time-out of the control plane (how long ranks wait for a rollout)."""


@dataclass(frozen=True)
class DataConfig:
    prompts: str = ""
    """Training prompts: a .jsonl or .parquet file, reasoning_gym:TASK, or module:attribute."""
    eval_prompts: str = ""
    """Held-out prompts, same forms; empty: no evaluation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string or a chat list."""
    answer_key: str = "answer"
    """Column of the reference answer."""
    chat_template: bool = False
    """Render string prompts as one user turn through the tokenizer's chat template (chat lists always are)."""
    chat_template_args: str = "{}"
    """JSON object of arguments to the chat template, e.g. {"enable_thinking": false} for Qwen3."""
    task_args: str = "{}"
    """JSON object passed to the reasoning-gym task, e.g. {"max_terms": 4}."""
    size: int = 0
    """Number of prompts to generate for reasoning_gym sources, or a cap for files; 0: 10000, or the whole file."""
    eval_size: int = 0
    """The same for eval_prompts."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out, with a count."""
    shuffle: bool = True
    """Shuffle the prompts anew each epoch (seeded)."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = "hf"
    """Engine kind: hf (embedded Hugging Face server, tiny models), vllm, sglang, or module:attribute."""
    num_engines: int = 1
    """Engine servers that the run starts by itself."""
    urls: tuple[str, ...] = ()
    """External engine servers; when given, none is started."""
    registry: str = ""
    """Folder in which `luspo engines` supervisors make their engines known to the run, which then starts none itself;
    empty: <run.dir>/engines when launch.engine_nodes is more than 0 (Slurm starts the supervisors then)."""
    engine_args: tuple[str, ...] = ()
    """Flags for vLLM or SGLang itself, as its own documentation names them; they win over the ones set here. One string
    may hold several, e.g. "--tensor-parallel-size 8 --enable-expert-parallel"."""
    engine_python: str = ""
    """Python interpreter of the environment that the engine is installed in; empty: this program's own."""
    engine_env: tuple[str, ...] = ()
    """Environment variables of the engines, each as NAME=value."""
    hand_over: Literal["auto", "on", "off"] = "auto"
    """Trainer and engines take turns with the memory of the GPUs that they share: while the engines generate, the
    trainer's lies in host memory, and while it trains, the engines sleep. auto: on GPUs, where the run starts vLLM or
    SGLang on the trainers' nodes."""
    in_flight_updates: bool = False
    """vLLM and SGLang: a weight push freezes running sequences, which go on under the new weights; otherwise it waits
    for them."""
    routed_experts: bool = False
    """Have the engine report the experts that its router chose (routing replay); SGLang, and vLLM on GPUs."""
    prompts_per_step: int = 128
    """Prompts per rollout step."""
    group_size: int = 8
    """Samples per prompt."""
    temperature: float = 1.0
    """Sampling temperature; also applied to the actor's log-probs."""
    top_p: float = 1.0
    """Nucleus sampling. Log-probs stay full-softmax."""
    max_response_tokens: int = 1024
    """Longest response; a longer one is truncated (finish reason "length")."""
    batch_size: int = 256
    """Sequences per generate request."""
    threads: int = 1
    """Torch threads of the embedded engine."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and sample more prompts (at most max_extra_rounds times)."""
    max_extra_rounds: int = 3
    """Bound of dynamic sampling."""
    max_retries: int = 3
    """How often a failed request is tried again on another engine."""
    request_timeout: float = 600.0
    """Seconds for one generate request, and for a weight push to wait for running sequences."""
    start_timeout: float = 300.0
    """Seconds for an engine to become healthy."""
    min_engines: int = 1
    """The run ends when fewer engines than this have been healthy for restart_timeout; dead ones are started again."""
    restart_timeout: float = 0.0
    """Seconds for dead engines to come back; 0: twice start_timeout, one to start and one to be given the weights."""


@dataclass(frozen=True)
class RewardConfig:
    terms: tuple[str, ...] = ("math:1.0",)
    """Weighted sum of name:weight, names: math, reasoning_gym, format, overlong, or module:attribute."""
    correct_term: str = ""
    """Term whose value of at least correct_threshold counts as correct (pass@k); empty: the first term."""
    correct_threshold: float = 1.0
    """See correct_term. reasoning-gym gives wrong answers up to 0.05, so leave it at 1."""
    binary: bool = False
    """Turn the correct_term into 1 when correct and 0 otherwise before it is weighted."""
    answer_pattern: str = ""
    """Regular expression whose last match's first group is the answer for reasoning_gym scorers; empty: whole text."""
    overlong_buffer: int = 0
    """L_buf of the overlong penalty (tokens)."""
    overlong_factor: float = 0.3
    """Factor of the overlong penalty."""
    workers: int = 1
    """Reward worker processes."""
    timeout: float = 10.0
    """Seconds per sample; a slower one gets 0 and a counted warning."""
    memory_mb: int = 4096
    """Address-space limit of a reward worker above its start, 0: none."""


@dataclass(frozen=True)
class AlgorithmConfig:
    objective: str = "luspo"
    """luspo, gspo, grpo, drgrpo, dapo, cispo, or module:attribute."""
    clip_low: float = 2e-3
    """Lower clip distance (the ratio is clipped to 1 - clip_low). Token-level objectives usually take 0.2."""
    clip_high: float = 2.5e-3
    """Upper clip distance."""
    kl_coef: float = 0.0
    """Weight of the k3 KL term to the reference policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    advantage_std: bool = True
    """Divide the advantages of a group by their standard deviation."""
    advantage_ddof: int = 1
    """Delta degrees of freedom of that standard deviation."""
    advantage_eps: float = 1e-6
    """Added to that standard deviation."""
    prompts_per_mini_batch: int = 16
    """Prompts per optimizer step; prompts_per_step / prompts_per_mini_batch updates per rollout make the clip act."""
    epochs: int = 1
    """Passes over each rollout."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = 20
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear"] = "constant"
    """Schedule after the warm-up; linear falls to 0 at the last step."""
    beta1: float = 0.9
    """Adam beta 1."""
    beta2: float = 0.98
    """Adam beta 2."""
    eps: float = 1e-8
    """Adam epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_grad: float = 1.0
    """Global gradient norm clip; 0: none."""
    cpu_offload: bool = False
    """Keep the optimizer state in host memory (CUDA only)."""


@dataclass(frozen=True)
class BatchConfig:
    max_tokens_per_micro_batch: int = 16384
    """Token budget of one packed micro-batch of one data-parallel rank."""


@dataclass(frozen=True)
class LossConfig:
    chunk_bytes: int = 0
    """Working memory of one chunk of logits in the loss stage; 0: 16 MiB on CPU, 256 MiB on CUDA."""
    cache_bytes: int = -1
    """Memory for exponentials kept from forward to backward, which saves recomputing those logits; 0: none, -1: as much
    as the head's gradient takes later, so that the peak does not rise."""
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Row arithmetic of the loss stage; auto: triton on CUDA where it is installed, else torch."""


@dataclass(frozen=True)
class WeightSyncConfig:
    bucket_bytes: int = 512 * 2**20
    """Upper bound of one weight bucket."""
    verify: Literal["off", "sample", "full"] = "full"
    """Compare per-tensor checksums at both ends: never, for a sample (other tensors in each push), or for all."""
    transport: Literal["process_group", "cuda_ipc", "disk"] = "process_group"
    """How the bytes travel: a process group (gloo on CPU, NCCL on GPU), GPU memory shared with engines on the same GPUs
    (cuda_ipc), or safetensors files in a folder that trainer and engines share (disk)."""
    folder: str = ""
    """Folder of the disk transport; empty: <run.dir>/weights."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 50
    """Save every so many rollout steps (and at the end); 0: only at the end."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted after a newer one is complete."""
    export_at_end: bool = True
    """Write the final policy as Hugging Face safetensors to <run.dir>/export."""


@dataclass(frozen=True)
class EvalConfig:
    every: int = 50
    """Evaluate every so many steps; before the first and after the last step always. 0: only there."""
    samples: int = 4
    """Samples per held-out prompt (pass@1 and pass@k)."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation."""
    greedy: bool = True
    """Also one greedy sample per prompt."""
    interim_size: int = 200
    """Held-out prompts of the evaluations between the first and the last; 0: all."""


@dataclass(frozen=True)
class LaunchConfig:
    launcher: Literal["auto", "local", "slurm"] = "auto"
    """Who starts the ranks: this program (local), srun from inside an allocation (slurm), or slurm in a batch script
    and local elsewhere (auto). Under torchrun, mpirun or srun the ranks are there already and this has no say."""
    gpus_per_node: int = 8
    """GPUs (trainer ranks) of a node; a run of fewer ranks takes one node."""
    engine_nodes: int = 0
    """Nodes of the allocation kept for rollout engines, the last ones; 0: engines share the trainers' nodes."""
    requeue: bool = True
    """Slurm: after a warning (sbatch --signal, preemption) put the job back into the queue once it has saved."""
    stop_grace: float = 600.0
    """Slurm: seconds that the ranks get to finish their step and save when asked to stop."""


@dataclass(frozen=True)
class Config:
    """Everything `luspo train` can be told."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True)
class SftDataConfig:
    path: str = ""
    """Demonstrations: a .jsonl or .parquet file."""
    prompt_key: str = "prompt"
    """Column of the prompt (string or chat list)."""
    response_key: str = "response"
    """Column of the response; the eos token is appended."""
    chat_template_args: str = "{}"
    """JSON object of arguments to the chat template of chat lists, e.g. {"enable_thinking": false} for Qwen3."""
    max_tokens: int = 2048
    """Longer demonstrations are left out, with a count."""


@dataclass(frozen=True)
class SftConfig:
    """Everything `luspo sft` can be told."""

    run: RunConfig = field(default_factory=lambda: RunConfig(dir="runs/sft", steps=500))
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    batch_size: int = 96
    """Demonstrations per optimizer step."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5, decay="linear"))
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True)
class EvalCommandConfig:
    """Everything `luspo eval` can be told."""

    checkpoint: str = ""
    """Run folder or checkpoint folder whose policy is evaluated; empty: the weights in model.hf."""
    out: str = "runs/eval"
    """Folder for the results; nothing is written outside it."""
    seed: int = 0
    """Seed of the sampling."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)


@dataclass(frozen=True)
class ExportConfig:
    """Everything `luspo export` can be told."""

    checkpoint: str = ""
    """Run folder (its newest checkpoint is taken) or checkpoint folder to export."""
    out: str = ""
    """Folder for the Hugging Face model; it must not exist or be empty."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Dtype of the written tensors; empty: as trained."""


@dataclass(frozen=True)
class ParityConfig:
    """Everything `luspo parity` can be told."""

    out: str = "runs/parity"
    """Folder for the report and the logs; nothing is written outside it."""
    seed: int = 0
    """Seed of prompts and sampling."""
    prompts: int = 8
    """Prompts to sample from."""
    samples: int = 2
    """Samples per prompt."""
    tolerance: float = 0.0
    """Largest log-prob difference that passes; 0: 1e-5 in float32, 0.05 in bfloat16 (router ties may exceed it)."""
    push: bool = True
    """Push the actor's weights to the engines first; false compares what the engines have loaded by themselves."""
    reference: bool = True
    """Also run transformers, in one process on the CPU, with the whole model in its memory."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_response_tokens=32))
    batch: BatchConfig = field(default_factory=BatchConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
