NGPU=${NGPU:-"8"}
CONFIG_FILE=${CONFIG_FILE:-"./llama3_8b.toml"}
overrides=""
if [ $# -ne 0 ]; then
    overrides="$*"
fi
PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True" \
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
--local-ranks-filter ${LOG_RANK:-0} --role rank --tee 3 \
-m torchtitan.train --job.config_file ${CONFIG_FILE} --parallelism.tensor_parallel_degree 2 --training.compile $overrides
