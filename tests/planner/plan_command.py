"""`python -m plan_command plan ...`: the command line, for child processes of the tests."""

from vllm_gaudi_ext.cli import main

if __name__ == "__main__":
    main()
