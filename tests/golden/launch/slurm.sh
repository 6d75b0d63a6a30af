#!/bin/bash
#SBATCH --job-name=digits-third-try
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=h100:2
#SBATCH --mem=64G
#SBATCH --time=01:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="/work/my runs/digits/job/job.%a.out"
#SBATCH --array=0-9%2
#SBATCH --dependency=afterany:41:42
#SBATCH --partition=mit_normal_gpu
#SBATCH --account=m1234
#SBATCH --qos=normal
#SBATCH --constraint="a100&nvlink"
#SBATCH --reservation=course
#SBATCH --exclusive
#SBATCH --mail-type=END

trap '' USR1
unset RIDGELINE_ENDS_AT RIDGELINE_WARN_S RIDGELINE_REQUEUE RIDGELINE_ARRAY
export RIDGELINE_ENDS_AT=$(($(date +%s) + 5400))
set -e
module load miniforge/23.11.0-0
module load cuda
export OMP_NUM_THREADS=8
export NOTE='a "b" $c'
cd -- '/work/my runs'
exec apptainer exec --nv --bind /data '/images/torch 2.sif' python -m supervise --name 'it'"'"'s $HOME' $'two\nlines' </dev/null
