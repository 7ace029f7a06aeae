"""The workers of a vLLM engine on a node other than its server's: what `vllm serve --headless` does.

That command asks for the version of a package named vllm, which vLLM's builds for CPUs do not have. Runs under the
engine's Python: python -m luspo_megatron.rollout.inside_engine.vllm_part FLAGS OF THE SERVER --node-rank 1
"""

from __future__ import annotations


def main() -> None:
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    args.api_server_count = 0
    run_headless(args)


if __name__ == "__main__":  # its own processes import this module
    main()
