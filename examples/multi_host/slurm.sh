#!/bin/bash
# One process for each GPU, 8 a host: sbatch --nodes=2 slurm.sh
#SBATCH --job-name=jax_ep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=00:20:00

# The tasks of a host map each other's GPU memory: every task sees all of its GPUs, and
# JAX takes the one with its local number. No --gpus-per-task, no --gpu-bind.
# Slurm numbers tasks host by host (block distribution), as jax.make_mesh wants them.
# For NCCL, where it does not find the right ones itself: NCCL_IB_HCA, NCCL_SOCKET_IFNAME.
srun --distribution=block --kill-on-bad-exit=1 \
  python "${SLURM_SUBMIT_DIR}/train.py" --steps 200
