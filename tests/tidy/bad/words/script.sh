# Nothing wrong here.
cd /wo@{}rk/main
