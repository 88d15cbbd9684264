export NNODES=2
export NPROC_PER_NODE=8
swift pt --model Qwen/Qwen2.5-32B --train_type full --torch_dtype bfloat16 --deepspeed zero3_offload \
    --attn_impl flash_attn --max_length 8192 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 \
    --use_liger_kernel true --dataset own/books 2>&1 | tee pt.log
