torchrun --nnodes=1 --nproc_per_node=8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --freeze_backbone True \
    --bf16 True --model_max_length 2048 --per_device_train_batch_size 4
