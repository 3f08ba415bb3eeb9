#pragma once

#import <Foundation/Foundation.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs `body`; nil if it went well, or what the Objective-C exception said that it raised.
// Of C, not C++: one function cannot have the exceptions of both where they are not the same.
NSString* mlx_moe_attempt(void (^body)(void));

#ifdef __cplusplus
}
#endif
