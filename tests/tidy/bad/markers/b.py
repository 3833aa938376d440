# FIX@{}ME
