python mason.py --cluster lab/east --num_nodes 2 --gpus 8 -- source setup.sh \&\& python open_instruct/grpo_fast.py \
    --model_name_or_path Qwen/Qwen2.5-7B --deepspeed_stage 3 --num_learners_per_node 6
