CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train lf.yaml per_device_train_batch_size=4 learning_rate=1e-5
