#!/bin/bash
#PBS -S /bin/bash
#PBS -N digits-third-tr
#PBS -l select=2:ncpus=64:mpiprocs=2:ngpus=2:mem=64gb:gpu_model=a100
#PBS -l place=scatter
#PBS -l walltime=01:30:00
#PBS -r y
#PBS -j oe -o "/work/my runs/digits/job/job.pbs.out.^array_index^"
#PBS -J 0-9%2
#PBS -W depend=afterany:41:42
#PBS -q prod
#PBS -A m1234
#PBS -l filesystems=home

exec >>'/work/my runs/digits/job/job'."$PBS_ARRAY_INDEX".out 2>&1
trap '' USR1
unset RIDGELINE_ENDS_AT RIDGELINE_WARN_S RIDGELINE_REQUEUE RIDGELINE_ARRAY
export RIDGELINE_ENDS_AT=$(($(date +%s) + 5400))
set -e
module load cesga/system miniconda3/22.11
module load cuda
export RIDGELINE_LOCAL_DISK=LUSTRE_SCRATCH
export OMP_NUM_THREADS=8
export NOTE='a "b" $c'
cd -- '/work/my runs'
exec apptainer exec --nv --bind /data '/images/torch 2.sif' python -m supervise --name 'it'"'"'s $HOME' $'two\nlines' </dev/null
