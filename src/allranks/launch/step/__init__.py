"""Steps of srun that tell something: started, listened to, and ended in order."""
